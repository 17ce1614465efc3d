"""What a run tells: metrics, console lines, figures and the report page. It decides nothing."""
