// <cmath> without the special functions of C++17. libstdc++ has 17,000 lines for them, which take a fifth of the time to
// compile a kernel.
#pragma once

// Any header sets up libstdc++'s configuration, with this macro. Other libraries do not have it.
#include <cstddef>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <cmath>
