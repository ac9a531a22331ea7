// OpenMP's version and a guard for forks; a serial build has one thread. The loop over work items is in engine.pyx.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif
#ifndef _WIN32
#include <pthread.h>
#endif

namespace convpar {

inline int openmp_version() {
#ifdef _OPENMP
    return _OPENMP;
#else
    return 0;
#endif
}

// libgomp's threads don't survive a fork, and a child that waits for them hangs. Ending the pool before the fork
// costs the parent about 90 us at its next parallel call.
inline void pause_threads() {
#ifdef CONVPAR_OMP_PAUSE
    omp_pause_resource_all(omp_pause_soft);
#endif
}

// To be called before the first parallel region.
inline void guard_fork() {
#if defined(CONVPAR_OMP_PAUSE) && !defined(_WIN32)
    static const int done = pthread_atfork(pause_threads, nullptr, nullptr);
    (void)done;
#endif
}

}  // namespace convpar
