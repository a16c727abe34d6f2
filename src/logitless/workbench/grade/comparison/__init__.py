"""Methods side by side: intervals over seeds, curves, criteria and their verdicts, the page."""
