"""``thunder-zero why``: the measured step of a training script beside its forecast."""
