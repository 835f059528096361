"""Questions to the table of a step: printed lines, one parameter, two programs, a step in Perfetto."""
