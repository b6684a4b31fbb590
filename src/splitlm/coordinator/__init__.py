"""The one who decides which cut serves: a library without I/O of its own, hosted by the head of a ring. No torch."""
