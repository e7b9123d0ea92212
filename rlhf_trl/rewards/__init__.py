"""What an answer is worth: rewards by name or path, checked, and reward models as rewards.

Reading and comparing an answer's text is in `rlhf_trl.data.answers`.
"""
