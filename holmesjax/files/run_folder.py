"""Names of files of a run folder that several packages write, read or bring elsewhere."""

METRICS = "metrics.jsonl"  # has a line for each step
ALLOWED = "allowed.json"  # the changes of settings that `--allow` has permitted
ALLOWED_DIFFERENCES = "allowed_differences.json"  # and the differences between processes
RESTARTS = "restarts.json"  # the starts of a job
ROUNDS = "rounds.jsonl"  # of an island that is a job of its own: rounds of the mailbox, and events
MANIFESTS = "checkpoints/step_*/manifest.json"  # of the checkpoints that count
