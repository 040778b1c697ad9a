"""The files that megarl init writes, except this one."""
