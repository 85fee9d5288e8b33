"""Speculative decoding with the real target. The only part of stage two that loads one."""
