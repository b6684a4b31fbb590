"""A text to measure engines over where none is given. Written for this."""

from __future__ import annotations

TEXT = """\
The ferry leaves the island at six, when the light is still grey, and it does not wait. Everybody knows this, \
and so the road to the harbour is busy long before the sun comes up. First come the fishermen, who sleep \
little in any season, and then the two teachers with their bags of exercise books, and at the very end, \
running, the boy who sells newspapers on the other side.

On the morning of the storm there was no wind at all. The water lay flat, and the gulls stood on the wall in a \
row and looked inland, which they never do. Old Marta, who had counted the passengers for thirty years, looked \
at the gulls, then at the sky, and locked the gate. "Not today," she said. The captain laughed. He had a new \
engine, two radios and a forecast printed on good paper, and the forecast promised sun until Thursday.

They argued for a quarter of an hour. The teachers sat down on their bags. One of the fishermen said that his \
knee hurt, and that it hurt only before rain; another said that it hurt every day, and had done so since the \
wedding of his sister. In the end the captain shrugged, went below, and came back with a pot of coffee and \
nine cups.

The first gust arrived at half past seven. It took the roof of the ticket office, turned it over twice, and \
set it down gently in the middle of the bay, where it floated for a while like a small red boat. Nobody spoke. \
Then the boy who sells newspapers began to clap, and after him the others, and Marta, who had not smiled at \
anyone since the spring, took off her cap and made a bow.

How did she know? People asked her for years, and every time she gave another answer. She had seen the gulls. \
She had smelled the weed. Her mother had taught her to listen to the stones, which move a little under water \
before the waves do. To the captain alone she told the truth: the printed forecast in his hand had been that \
of the week before.
"""
