"""Checkpoints of other frameworks, made into ones of phalanx.

conversion      what the user calls
layout          which format lies in a file or folder, by names alone
handover        starts the process that reads foreign pickles, and takes over what it wrote
child           that process; confinement, stand_ins, inert_pickle and sharded_files are its parts
lightning, accelerate, deepspeed, state_dicts
                from what was read to model, optimizers and progress
naming, ordering
                which parameter is which
foreign         what all formats come down to, and its checkpoint
"""
