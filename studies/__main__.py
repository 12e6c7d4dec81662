"""``python -m studies NAME``."""

import sys

import tyro

from studies.command import PROGRAM, StudySettings, main

if __name__ == "__main__":
    sys.exit(main(tyro.cli(StudySettings, prog=PROGRAM)))
