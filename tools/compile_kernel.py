"""Runs one compiler command of the build: python tools/compile_kernel.py LOG COMMAND ...

What ptxas says of each kernel goes to LOG, for tools/kernel_report.py, with what the compilation cost; the
rest (warnings, errors) is shown.
"""

import resource
import subprocess
import sys


def main() -> int:
    log, *command = sys.argv[1:]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cost = f"cost: {used.ru_utime + used.ru_stime:.1f} CPU s, {used.ru_maxrss / 2**20:.2f} GiB"
    with open(log, "w") as file:
        file.write(f"{ran.stdout}{cost}\n")
    for line in ran.stdout.splitlines():
        if "ptxas info" not in line and "stack frame" not in line:
            print(line)
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
