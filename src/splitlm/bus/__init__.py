"""Messages in and out: the control plane as a star whose hub is wherever the coordinator runs."""
