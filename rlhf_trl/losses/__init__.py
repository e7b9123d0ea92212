"""The loss of an algorithm on plain tensors: a row of the table, read over the book's functions.

`policy_gradient_loss`, `preference_loss`, `reward_loss` and `distillation_loss`, in `checked`, are
the whole of it, one for each family; they check what they are given. What they compute then is what
trainers call: a module for each family.
"""
