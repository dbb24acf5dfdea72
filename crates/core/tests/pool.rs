//! Seeded schedules through both machines, the gateway in front of the worker, every invariant of both checked after
//! every event: each caller gets exactly one last word, whatever fails.

mod world;

use std::{collections::BTreeMap, time::Duration};
use warmset_core::{
    Instant, Machine, ModelName, Priority, RequestId, TenantId, WorkerId,
    gateway::{self, ColdPolicy, Gateway, Refusal, Route},
    targets::Targets,
    worker,
};
use world::{Behaviour, Note, Random, World, id, settings, spec};

const SEEDS_DEFAULT: u64 = 200;
/// Seeds that are replayed in the everyday run.
const REPLAYED_SEEDS: u64 = 20;
const MODELS: u8 = 6;
const WORKER: WorkerId = WorkerId(0);

#[derive(Debug, Clone, PartialEq)]
enum LastWord {
    Answered,
    Refused(Refusal),
    /// The caller went away first.
    Left,
}

struct Pool {
    gateway: Gateway,
    node: World,
    words: BTreeMap<RequestId, LastWord>,
    asked: Vec<RequestId>,
    log: Vec<(Instant, gateway::Event, Vec<gateway::Action>)>,
}

impl Pool {
    fn new(node: World, limits: gateway::Settings) -> Self {
        let mut pool = Self { gateway: Gateway::new(limits), node, words: BTreeMap::new(), asked: vec![], log: vec![] };
        pool.tell(gateway::Event::WorkerUp { worker: WORKER });
        pool
    }

    fn tell(&mut self, event: gateway::Event) {
        let mut actions = vec![];
        self.gateway.handle(self.node.now, event.clone(), &mut actions);
        self.log.push((self.node.now, event, actions.clone()));
        if let Err(violation) = self.gateway.check() {
            panic!("{violation:?} after {:?}", self.log.last());
        }
        for action in actions {
            self.perform(action);
        }
        self.pass_on_notes();
    }

    fn perform(&mut self, action: gateway::Action) {
        match action {
            gateway::Action::Dispatch { request, digest, tenant, class, .. } => {
                // A request that is tried again is a new one to the worker.
                self.node.answers.remove(&request);
                self.node.feed(worker::Event::Assigned { request, digest, tenant, class });
            }
            gateway::Action::Cancel { request, cause, .. } => self.node.cancel(request, cause),
            gateway::Action::Refuse { request, refusal } => self.last_word(request, LastWord::Refused(refusal)),
            gateway::Action::Prewarm { digest, .. } => self.node.feed(worker::Event::LoadWanted { digest }),
            gateway::Action::Position { position, .. } => assert!(position > 0),
        }
    }

    /// What the worker has said since, in order.
    fn pass_on_notes(&mut self) {
        while !self.node.notes.is_empty() {
            match self.node.notes.remove(0) {
                Note::Started(request, start) => self.tell(gateway::Event::Started { request, start }),
                Note::Ended(request) => {
                    if !self.words.contains_key(&request) {
                        self.last_word(request, LastWord::Answered);
                    }
                    self.tell(gateway::Event::Finished { request, prompt_tokens: 1, completion_tokens: 1 });
                }
                Note::Dropped(request) => self.tell(gateway::Event::Failed { request }),
                Note::Rejected(request, rejection) => self.tell(gateway::Event::Rejected { request, rejection }),
                Note::State(digest, state) => {
                    self.tell(gateway::Event::WorkerState { worker: WORKER, digest, state });
                }
            }
        }
    }

    fn last_word(&mut self, request: RequestId, word: LastWord) {
        let before = self.words.insert(request, word.clone());
        assert!(before.is_none(), "{request:?} is told {before:?}, then {word:?}");
    }

    fn ask(&mut self, number: u8, class: Priority, patience: Duration) {
        let request = RequestId(self.asked.len() as u64);
        self.asked.push(request);
        let tenant = TenantId::anonymous();
        self.tell(gateway::Event::Arrived { request, tenant, digest: id(number), class, patience });
    }

    fn leave(&mut self, request: RequestId) {
        self.words.entry(request).or_insert(LastWord::Left);
        self.tell(gateway::Event::Cancelled { request });
    }

    fn run_for(&mut self, duration: Duration) {
        let until = self.node.now + duration;
        loop {
            let timer = self.gateway.next_timer().map(|at| at.max(self.node.now));
            let next = self.node.next_at().into_iter().chain(timer).min();
            let Some(next) = next.filter(|next| *next <= until) else { break };
            if timer == Some(next) {
                self.node.now = next;
                self.tell(gateway::Event::Timer);
            } else {
                self.node.step();
                self.pass_on_notes();
            }
        }
        self.node.now = until;
    }
}

fn any_pool(random: &mut Random) -> Pool {
    let mut limits = settings();
    limits.concurrent_loads_max = 1 + u32::try_from(random.below(2)).expect("small");
    let mut pool = Pool::new(
        World::new(limits),
        gateway::Settings {
            queue_limit: if random.chance(30) { 4 } else { 1_000 },
            queue_limit_per_model: if random.chance(30) { 3 } else { 1_000 },
            attempts_max: 2,
            aging: Duration::from_secs(5),
            retry_after_max: Duration::from_secs(120),
            parks: true,
        },
    );
    for number in 1..=MODELS {
        let bytes = 10 + random.below(80);
        let behaviour = Behaviour {
            load: Duration::from_millis(random.below(4_000)),
            run: Duration::from_millis(1 + random.below(3_000)),
            failing_loads: if random.chance(20) { u32::try_from(random.below(4)).expect("small") } else { 0 },
            crash_at_request: random.chance(30).then(|| 1 + u32::try_from(random.below(5)).expect("small")),
            hang_at_request: random.chance(10).then(|| 1 + u32::try_from(random.below(5)).expect("small")),
            ignores_stop: random.chance(10),
            ..Behaviour::plain(bytes)
        };
        let model = spec(number, bytes);
        pool.node.add(model, behaviour);
        pool.tell(gateway::Event::Configure(Route {
            digest: id(number),
            name: ModelName::parse(&format!("model-{number}")).expect("a good name"),
            priority: Priority::Standard,
            max_concurrency: 1 + u32::try_from(random.below(5)).expect("small"),
            critical_reserve: u32::from(random.chance(30)),
            parks: random.chance(50),
            cold: if random.chance(20) { ColdPolicy::Reject } else { ColdPolicy::Wait },
            rewarm_seconds: 1.0,
            targets: Targets { ttft_p99_warm_ms: random.chance(30).then_some(500), ..Targets::default() },
        }));
    }
    pool
}

fn play(seed: u64) -> Pool {
    let mut random = Random(seed);
    let mut pool = any_pool(&mut random);
    for _ in 0..100 {
        let number = 1 + u8::try_from(random.below(u64::from(MODELS))).expect("small");
        match random.below(100) {
            0..70 => {
                let class = Priority::ALL[usize::try_from(random.below(3)).expect("small")];
                pool.ask(number, class, Duration::from_millis(200 + random.below(60_000)));
            }
            70..85 if !pool.asked.is_empty() => {
                let place = usize::try_from(random.below(pool.asked.len() as u64)).expect("small");
                pool.leave(pool.asked[place]);
            }
            85..87 => {
                pool.node.feed(worker::Event::UnloadWanted { digest: id(number) });
                pool.pass_on_notes();
            }
            _ => {}
        }
        if random.chance(60) {
            pool.run_for(Duration::from_millis(random.below(2_000)));
        }
    }
    pool.run_for(Duration::from_secs(3_600));
    pool
}

#[test]
fn every_caller_gets_exactly_one_last_word_and_all_permits_return() {
    let seeds = world::seeds(SEEDS_DEFAULT);
    for seed in seeds {
        eprintln!("WARMSET_SEED={seed}");
        let pool = play(seed);
        for request in &pool.asked {
            assert!(pool.words.contains_key(request), "seed {seed}: {request:?} was never answered");
        }
        assert_eq!(pool.gateway.requests(), 0, "seed {seed}");
        assert_eq!(pool.gateway.queue_depth(), [0; 3], "seed {seed}");
        assert!(pool.gateway.running().all(|(_, running)| running == 0), "seed {seed}");
    }
}

#[test]
fn a_recorded_gateway_replays_to_the_same_actions() {
    for seed in world::seeds(REPLAYED_SEEDS) {
        let pool = play(seed);
        world::replay(seed, Gateway::new(pool.gateway.settings().clone()), &pool.log);
    }
}
