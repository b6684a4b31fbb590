"""What a run writes about itself: records, where they go, and what they add up to. Never raises, never blocks."""
