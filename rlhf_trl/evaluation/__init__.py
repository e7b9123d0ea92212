"""How good a policy is: held-out answers, best-of-n, samples, tables and figures."""
