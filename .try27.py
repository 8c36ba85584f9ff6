import sys, tempfile, time
from pathlib import Path
from tests.driver.ranks import Ranks
import tests.driver.test_sharing as T, tests.driver.test_mesh as M

if __name__ == "__main__":
    world = int(sys.argv[1])
    r = Ranks(Path(tempfile.mkdtemp()), world)
    for call in sys.argv[2:]:
        t = time.time()
        try:
            print(call, str(eval(call))[:3000], time.time() - t)
        except BaseException as e:
            print(call, "FAILED", str(e)[-3000:], time.time() - t)
            break
    r.close()
