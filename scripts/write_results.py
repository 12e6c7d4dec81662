"""Write the tables and pictures of docs/results.md anew, from the runs in docs/results alone."""

import re
from pathlib import Path

from sb3_per.experiments.agents import parse_agents
from sb3_per.experiments.evidence import STUDIES, base_of
from sb3_per.experiments.evidence_report import write_report

PAGE = Path(__file__).parents[1] / "docs" / "results.md"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, study in STUDIES.items():
        agents = [str(agent) for agent in parse_agents(study.agents)]
        lines = write_report(PAGE.with_name("results") / name, agents, base_of(name))
        marks = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(marks[0])}.*?{re.escape(marks[1])}", re.DOTALL)
        table = marks[0] + "\n".join(lines) + "\n" + marks[1]
        text, n = pattern.subn(lambda _, table=table: table, text)
        assert n == 1, f"{PAGE} has no place for {name}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
