"""Features: what some variants of a family do and others do not, by the names that specs give them.

Templates find them in `features`, declarations of parameters and `schedule/` by these names. A spec may have
further ones for its templates.
"""

# Tiles of keys clear dq_accum of a later head of the grid, and add to it once all of it is clear.
CLEARS_AHEAD = "clears_ahead"
# The step before the main one finds its blocks of keys, from lengths on the device.
PLACES_BLOCKS = "places_blocks"
# Shares are cut within sets of heads (`schedule.shares`).
HEAD_SETS = "head_sets"
# Elements of an array of a score modification, by query and key, are copied to shared memory before their
# scores are there. Modified variants have it where a block has room for them.
STAGES_SCORES = "stages_scores"
# A warpgroup converts codes of K and V to elements, on their way from TMA to wgmma.
CONVERTS_CODES = "converts_codes"
# As STAGES_SCORES, but warps of the producer copy elements before consumers need them, also of 32 bits.
STREAMS_SCORES = "streams_scores"
# A step before the main one writes V^T of each block of keys as the main one wants it in shared memory.
TILED_V = "tiled_v"
