"""The command line: one file per verb, each thin. The only place that reads arguments and the environment."""
