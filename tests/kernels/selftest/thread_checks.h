// Loops over several threads: that each item has its turn once, whatever the number of threads.
#pragma once

namespace edgeh2o::selftest {

bool check_threads();  // prints what is wrong

}  // namespace edgeh2o::selftest
