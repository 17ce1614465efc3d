"""The file that adds the toys to other processes is no test."""

collect_ignore = ["on_path"]
