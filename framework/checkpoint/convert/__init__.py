"""Checkpoints of other frameworks, converted to checkpoints of phalanx.

convert             the function for users
detect_format       the format of a file or folder, by names of files alone
pickles, dcp        readers of pickles, and of folders of torch.distributed.checkpoint
lightning, accelerate, deepspeed
                    model, optimizers and progress of each format
parameter_order     the names of parameters in optimizers whose state is by position
foreign_state       the form common to all formats, and its checkpoint
"""
