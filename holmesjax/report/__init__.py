"""Reports of a run: metrics, console lines, figures and the report page. It decides nothing."""
