/* What a container's first process is before its program: it makes the system calls that launch.py has written down.
 *
 * Python's own fork copies page after page of the interpreter for each container, which is more than half of what a start
 * costs. This does the same without an interpreter. It decides nothing: which calls, with what, and what an error means is
 * all in launch.py, which makes the same calls itself where this was not compiled. No C library, so nothing to initialise.
 */

#define PLAN 3 /* the descriptors that it is given; a plan names all others itself */
#define FAIL 4
#define BASE 0x2000000000 /* where a plan lies in memory; the addresses in it count on that */
#define ROOM (1 << 24)
#define LAST_ERROR 4095
#define ACCEPTABLE 63 /* errors up to this one can be accepted */

struct step {
    long call, with[6];
    unsigned long indirect; /* a bit for each argument that is the address of the argument */
    unsigned long accepted; /* a bit for each error that is none */
    long skipped;           /* the steps to leave out after such an error */
    long expected;          /* the only good result, or -1 */
    long *result;           /* where to put it, or 0 */
};

struct plan {
    struct step *steps;
    long count;
};

struct failure {
    int step, error; /* an unexpected result has no error */
};

#if defined(__x86_64__)
#define ENTRY __attribute__((force_align_arg_pointer)) /* the kernel aligns the stack otherwise than a caller does */
enum { WRITE = 1, MAP = 9, EXIT = 231 };

static long call(long number, const long *with)
{
    register long fourth __asm__("r10") = with[3], fifth __asm__("r8") = with[4], sixth __asm__("r9") = with[5];
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(with[0]), "S"(with[1]), "d"(with[2]), "r"(fourth), "r"(fifth), "r"(sixth)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
#define ENTRY
enum { WRITE = 64, MAP = 222, EXIT = 94 };

static long call(long number, const long *with)
{
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = with[0], x1 __asm__("x1") = with[1],
                  x2 __asm__("x2") = with[2], x3 __asm__("x3") = with[3], x4 __asm__("x4") = with[4],
                  x5 __asm__("x5") = with[5];
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}
#else
#error "unknown machine: Moorage starts containers from Python there"
#endif

static int failed(long result)
{
    return result < 0 && result >= -LAST_ERROR;
}

static void leave(long step, long error)
{
    struct failure why = {(int)step, (int)error};
    long told[6] = {FAIL, (long)&why, sizeof why};
    long status[6] = {127};
    call(WRITE, told);
    call(EXIT, status);
}

static void make(const struct plan *plan)
{
    for (long at = 0; at < plan->count; at++) {
        const struct step *step = &plan->steps[at];
        long with[6];
        for (int i = 0; i < 6; i++)
            with[i] = step->indirect >> i & 1 ? *(long *)step->with[i] : step->with[i];
        long result = call(step->call, with);
        if (failed(result)) {
            if (-result > ACCEPTABLE || !(step->accepted >> -result & 1))
                leave(at, -result);
            at += step->skipped;
        } else if (step->expected >= 0 && result != step->expected) {
            leave(at, 0);
        } else if (step->result) {
            *step->result = result;
        }
    }
}

ENTRY void _start(void)
{
    long readable_writable = 3, private_fixed_noreplace = 0x100002;
    long with[6] = {BASE, ROOM, readable_writable, private_fixed_noreplace, PLAN, 0};
    if (call(MAP, with) != BASE)
        leave(-1, 0);
    make((const struct plan *)BASE);
    leave(-1, 0); /* a plan ends with a program, or with an exit */
}
