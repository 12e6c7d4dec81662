"""The evidence behind docs/results.md: studies that can be rerun."""
