"""What is decided before anything is traced: the policy, and the plan of each parameter."""
