"""What is written in Triton for CUDA; nothing here is imported where logits are on another device."""
