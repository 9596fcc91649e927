"""A long run of mixed traffic, faults and aborts on one server of ours, held against recorded stock outputs."""
