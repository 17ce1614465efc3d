"""Files of settings and records: read with line numbers, checked, written whole."""
