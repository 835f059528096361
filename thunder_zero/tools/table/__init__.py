"""The table of a step: a row for each line. Views read it."""
