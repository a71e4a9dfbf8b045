"""What users call: attention and what goes with it, and the plans that are kept between calls."""
