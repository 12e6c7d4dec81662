"""The studies are not installed: they are run from the checkout."""

import sys
from pathlib import Path

# Last, so that what is installed comes first
sys.path.append(str(Path(__file__).resolve().parents[3]))
