import torch, tempfile, sys
from pathlib import Path
from tests.driver.ranks import Ranks
import tests.driver.test_sharing as T

if __name__ == "__main__":
    r = Ranks(Path(tempfile.mkdtemp()), 4)
    try:
        if sys.argv[1] == "ada":
            theirs, expected = T.by_one("adagrad", "even", None)
            f = r(T.together, "adagrad", "even", False, {"shard": "optimizer", "sparse": "dense"})
            for n, v in theirs.state_dict().items():
                print(n, (f[0][0][n] - v).abs().max(), (f[0][0][n] - f[1][0][n]).abs().max())
            print(f[0][1:], expected)
        else:
            for w in (3, 1):
                print("world", w, flush=True)
                d = tempfile.mkdtemp()
                e = r(T.save_and_go_on, d)
                print("saved")
                for x in r(T.go_on, d, w):
                    print(None if x is None else {n: (x[n] - e[0][n]).abs().max() for n in x})
    except BaseException as err:
        print(str(err)[-2500:])
    r.close()
