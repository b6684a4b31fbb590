"""Models in parts: the only home of torch, transformers and their files. Opens no socket."""
