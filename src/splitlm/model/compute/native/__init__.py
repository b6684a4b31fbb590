"""Products of 8-bit weights of our own, in C++: compiled on the machine that runs them, once, into the user's cache."""
