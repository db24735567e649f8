"""Checkpoints of other frameworks, converted to checkpoints of phalanx.

convert             the function for users
detect_format       the format of a file or folder, by names of files alone
unpickle_client     starts the process that reads foreign pickles, and reads its results
unpickle_process    that process; sandbox, placeholder_objects, pickle_reader and dcp_files are its parts
lightning, accelerate, deepspeed, zero_partitions, dcp_state
                    model, optimizers and progress of each format
parameter_order     the names of parameters in optimizers whose state is by position
foreign_state       the form common to all formats, and its checkpoint
"""
