"""Figures: what this build reaches on this machine, as ratios measured in one run.

Both sides of a ratio run in turns (A B, B A, A B …) in processes that stay alive between their turns, so a machine that
grows slower or busier slows both. A figure is the median over the repetitions, shown with its least and largest value.
"""
