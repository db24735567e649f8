"""Checkpoints of other frameworks, made into ones of phalanx.

convert             the public function
detect_format       the format of a file or folder, by its names
unpickle_client     starts the process that reads foreign pickles, and reads its results
unpickle_process    that process; pickle_reader, placeholder_objects and sandbox are its parts
lightning, accelerate, deepspeed, zero_partitions, dcp_files, dcp_state
                    from the contents of one format to model, optimizers and progress
parameter_order, strip_prefixes
                    the names and the order of parameters
foreign_state       the common form of all formats, and its checkpoint
"""
