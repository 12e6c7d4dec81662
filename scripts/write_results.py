"""Write the tables and pictures of the studies again, from the runs in docs/results alone."""

from pathlib import Path

from studies.command import STUDIES, StudySettings, plan

PAGE = Path(__file__).parents[1] / "docs" / "results.md"


def main() -> None:
    """Write every table again."""
    text = PAGE.read_text(encoding="utf-8")
    for name, study in STUDIES.items():
        if not PAGE.with_name("results").joinpath(name).exists():
            # Planned, and not run yet
            continue
        _, agents, base = plan(StudySettings(name))
        lines = study.report(PAGE.with_name("results") / name, agents, base)
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if start in text:
            before, _, rest = text.partition(start)
            _, _, after = rest.partition(end)
            text = before + start + "\n".join(lines) + "\n" + end + after
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
