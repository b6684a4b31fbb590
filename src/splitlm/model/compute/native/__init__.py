"""What is compiled where a compiler is: products of 8-bit weights, and the steps between products; how to call them."""
