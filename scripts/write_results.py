"""Write the tables and pictures of docs/results.md anew, from the runs in docs/results alone."""

from pathlib import Path

from sb3_per.compare.agents import parse_agents
from studies.evidence import STUDIES, base_of
from studies.report import write_report

PAGE = Path(__file__).parents[1] / "docs" / "results.md"


def main() -> None:
    """Renew every table."""
    text = PAGE.read_text(encoding="utf-8")
    for name, study in STUDIES.items():
        agents = [str(agent) for agent in parse_agents(study.agents)]
        lines = write_report(PAGE.with_name("results") / name, agents, base_of(name))
        marks = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(marks[0])
        _, _, after = rest.partition(marks[1])
        assert after, f"{PAGE} has no place for {name}"
        text = before + marks[0] + "\n".join(lines) + "\n" + marks[1] + after
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
