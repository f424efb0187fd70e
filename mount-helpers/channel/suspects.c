/* Which request kills the daemons? Several are outstanding when one dies, and at most one of them did it.
 *
 *   the daemon had it and died, SUSPECT_DEATHS times ─► suspect: sent last, and few at once
 *                                  more than that    ─► sent alone
 *                            GIVEN_UP_DEATHS times   ─► EIO; so is a READ of the same bytes for a while
 *
 * So the guilty one is soon alone with the deaths, and the others are answered. Deaths before a daemon took over count for
 * nobody, since it was sent nothing; nor do ends that were asked for, nor SIGKILL (see main.c): a read that waits for its
 * source outlives any number of those. */
#include "channel.h"

#include <errno.h>

#define SUSPECT_DEATHS 2
#define GIVEN_UP_DEATHS 5
#define AT_ONCE_MAX 63
#define ALONE_S 2.0       /* the next suspect waits so long for those before */
#define REMEMBERED_S 60.0 /* the kernel reads again by itself what a readahead did not get */

static bool is_suspect(const struct request *r) { return r->deaths >= SUSPECT_DEATHS; }

static void give_up(struct channel *c, struct request *r) {
    say("given up: opcode %u, inode %llu, offset %llu, length %u: %u daemons died while they had it", r->opcode,
        (unsigned long long)r->nodeid, (unsigned long long)r->offset, r->asked, r->deaths);
    count(c, COUNT_GIVEN_UP, 1);
    if (r->opcode == OP_READ) {
        c->given_up[c->given_up_next] = (struct given_up){r->nodeid, r->offset, r->asked, now_s() + REMEMBERED_S};
        c->given_up_next = (c->given_up_next + 1) % GIVEN_UP_MAX;
    }
    r->state = REQUEST_QUEUED;
    request_answer(c, r, -EIO);
}

/* A daemon died by itself that had this request and was expected to answer. True: the request is gone. */
bool suspect_died(struct channel *c, struct request *r) {
    if (r->opcode == OP_INIT) /* without which there is no mount: the grace ends that */
        return false;
    if (++r->deaths == SUSPECT_DEATHS)
        c->suspect_count++;
    bool over = r->deaths >= GIVEN_UP_DEATHS;
    if (over)
        give_up(c, r);
    c->suspects_at_once = 0;
    return over;
}

/* The suspect to be sent now, if any: the one with the fewest deaths, and of those the oldest. */
static struct request *next_suspect(struct channel *c) {
    struct request *found = NULL;
    unsigned outstanding = 0;
    bool alone = false;
    double now = now_s();
    for (struct request *r = c->requests; r; r = r->next) {
        if (!is_suspect(r))
            continue;
        if (r->state == REQUEST_SENT && now - r->sent_s < ALONE_S) {
            outstanding++;
            alone |= r->deaths > SUSPECT_DEATHS;
        } else if (r->state == REQUEST_QUEUED && (!found || r->deaths < found->deaths)) {
            found = r;
        }
    }
    if (!found || alone)
        return NULL;
    return outstanding < (found->deaths > SUSPECT_DEATHS ? 1 : c->suspects_at_once + 1) ? found : NULL;
}

/* Whether a flush of all that is queued leaves it to suspects_send. */
bool suspect_held_back(const struct request *r) { return is_suspect(r); }

bool suspects_send(struct channel *c) {
    struct request *r;
    while (c->suspect_count && c->epoch->ready && (r = next_suspect(c))) {
        request_send(c, r);
        if (r->state == REQUEST_QUEUED)
            return true;
    }
    return false;
}

void suspect_removed(struct channel *c, const struct request *r) {
    if (!is_suspect(r))
        return;
    c->suspect_count--;
    c->suspects_at_once = c->suspects_at_once * 2 + 1; /* while nothing dies, ever more of them */
    if (c->suspects_at_once > AT_ONCE_MAX)
        c->suspects_at_once = AT_ONCE_MAX;
    wake_main(c);
}

/* Whether this new request reads what was given up a short while ago. */
bool suspect_known(struct channel *c, const struct request *r) {
    if (r->opcode != OP_READ)
        return false;
    for (unsigned i = 0; i < GIVEN_UP_MAX; i++) {
        const struct given_up *g = &c->given_up[i];
        if (g->until_s > 0 && g->nodeid == r->nodeid && r->offset < g->offset + g->length &&
            g->offset < r->offset + r->asked && now_s() < g->until_s) {
            count(c, COUNT_GIVEN_UP, 1);
            return true;
        }
    }
    return false;
}
