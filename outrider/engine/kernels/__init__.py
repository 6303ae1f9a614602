"""What is written in Triton for CUDA, imported only where logits are on such a device; and under cpu, what is
compiled for a processor.
"""
