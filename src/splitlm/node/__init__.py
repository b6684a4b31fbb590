"""One process of a ring: it joins, takes a part of the cut, and runs it."""
