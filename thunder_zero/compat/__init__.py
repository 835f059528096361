"""What exists because of Thunder 0.2.6 or of a version of torch, each file with the need for it."""
