"""Conversion of checkpoints of Lightning, Accelerate and DeepSpeed into checkpoints of phalanx.

convert            the entry point, with the arguments of request
detect_format      the format of a file or folder, by file names alone
unpickle_client    starts the process that reads foreign pickles, and reads its results
unpickle_process   that process; its parts are sandbox, pickle_reader, placeholder_objects and dcp_files
lightning, accelerate, deepspeed
                   from the contents of one framework's files to model, optimizers and progress; their parts are
                   dcp_state, zero_partitions and strip_prefixes
parameter_order    parameter names for optimizer state that is stored by position
foreign_state      the form common to all formats, and the checkpoint that is made of it
"""
