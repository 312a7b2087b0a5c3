"""What a trained run has learnt: its features, and what they say about the two assumptions of the paper."""
