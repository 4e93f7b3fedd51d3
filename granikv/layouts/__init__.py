"""Ways to place KV tokens in memory, one file each. A layout offers traits; kernels ask for them."""
