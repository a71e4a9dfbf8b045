"""From CUDA source to machine code: NVRTC, the disk cache, building many, disassembly."""
