use super::*;

fn metrics() -> Vec<Metric> {
    vec![
        Metric::new("accept", MetricType::Boolean),
        Metric::new("kept", MetricType::Float),
        Metric::new("retry", MetricType::Float),
    ]
}

fn signal(metric: &str, value: event::Value) -> Signal {
    Signal {
        metric: metric.to_owned(),
        value,
        ..example(&metrics()[0])
    }
}

fn reward(text: &str, signals: &[Signal]) -> Option<f64> {
    let signals: Vec<&Signal> = signals.iter().collect();
    let expression = Expression::new(text, &metrics()).unwrap();
    expression.reward(&Closing::example(), &signals).unwrap()
}

fn refusal(text: &str) -> String {
    format!("{:#}", Expression::new(text, &metrics()).unwrap_err())
}

#[test]
fn a_metric_is_its_first_value_or_null_and_all_is_a_list() {
    let accepted = signal("accept", event::Value::Bool(true));
    let rejected = signal("accept", event::Value::Bool(false));
    let text = "accept == null ? null : (accept ? 0.75 : -0.25)";
    assert_eq!(reward(text, &[]), None);
    assert_eq!(reward(text, &[accepted.clone(), rejected.clone()]), Some(0.75));
    assert_eq!(reward(text, &[rejected, accepted]), Some(-0.25));
    let retries = [(); 3].map(|()| signal("retry", event::Value::Float(1.0)));
    assert_eq!(reward("-0.5 * double(all.retry.size())", &retries), Some(-1.5));
    assert_eq!(reward("all.retry.filter(n, n > 2.0).size()", &retries), Some(0.0));
}

#[test]
fn signals_can_be_weighed_against_each_other() {
    let text = "declined ? 0.0 : kept == null ? null : kept - 0.1 * double(all.retry.size())";
    let signals = [
        signal("kept", event::Value::Float(0.5)),
        signal("retry", event::Value::Float(1.0)),
        signal("unknown", event::Value::Float(9.0)),
    ];
    assert_eq!(reward(text, &signals), Some(0.4));
}

#[test]
fn an_expression_that_cannot_be_computed_is_refused_at_startup() {
    assert!(refusal("accept ?").contains("is not a CEL expression"));
    assert!(refusal("acept ? 1.0 : 0.0").contains("names \"acept\""));
    let missing = refusal("accept ? 1.0 : 0.0");
    assert!(missing.contains("without any feedback"), "{missing}");
    let text = refusal("accept == null ? null : 'good'");
    assert!(text.contains("not a number"), "{text}");
    let mixed = refusal("kept == null ? null : kept * 2");
    assert!(mixed.contains("with one feedback event of each metric"), "{mixed}");
    assert!(refusal("1.0 / 0.0").contains("returns inf"));
}

#[test]
fn an_expression_knows_which_metrics_it_reads() {
    let expression = Expression::new("accept == null ? null : 1.0", &metrics()).unwrap();
    assert!(expression.reads("accept") && !expression.reads("kept") && !expression.reads("nothing"));
}

#[test]
fn too_deep_nesting_is_refused_before_the_parser() {
    let text = format!("{}declined ? 0.0 : kept == null* doublella()", "(".repeat(121));
    assert!(refusal(&text).contains("123 brackets"), "{}", refusal(&text));
    let most = format!("{}1.0{}", "(".repeat(NESTED_MAX), ")".repeat(NESTED_MAX));
    assert_eq!(reward(&most, &[]), Some(1.0));
}

#[test]
fn structures_are_refused_before_the_interpreter() {
    for text in [
        "Point{x: 1}.x",
        "[kept, [Point{}].size()].size()",
        "{'a': Point{}}.size()",
        "all.retry.map(n, Point{}).size()",
        "double(Point{})",
    ] {
        assert!(refusal(text).contains("makes a structure"), "{text}: {}", refusal(text));
    }
}

fn of_episode(text: &str, facts: &EpisodeFacts, signals: &[Signal]) -> Option<f64> {
    let signals: Vec<&Signal> = signals.iter().collect();
    let expression = Expression::of_episode(text, &metrics()).unwrap();
    expression.episode_reward(facts, &signals).unwrap()
}

fn refusal_of_episode(text: &str, metrics: &[Metric]) -> String {
    format!("{:#}", Expression::of_episode(text, metrics).unwrap_err())
}

#[test]
fn an_episode_sees_its_own_feedback_and_that_of_its_turns_apart() {
    let facts = EpisodeFacts {
        turns: 4,
        segments: 2,
        tokens: 40,
        seconds: 2.5,
        ended: true,
        of_turns: BTreeMap::from([
            (
                "accept".to_owned(),
                [true, false, false].map(event::Value::Bool).to_vec(),
            ),
            ("kept".to_owned(), [0.25, 1.0].map(event::Value::Float).to_vec()),
        ]),
        ..EpisodeFacts::default()
    };
    let reject = [signal("accept", event::Value::Bool(false))];
    let reward = |text: &str, signals: &[Signal]| of_episode(text, &facts, signals);
    assert_eq!(reward("accept == null ? 0.5 : 1.0", &[]), Some(0.5), "about turns only");
    assert_eq!(
        reward("accept == null ? 0.5 : accept ? 1.0 : -1.0", &reject),
        Some(-1.0)
    );
    for (text, expected) in [
        ("turn.first.accept == true ? 1.0 : 0.0", 1.0),
        ("turn.last.accept == true ? 1.0 : 0.0", 0.0),
        ("turn.mean.accept == null ? 0.0 : turn.mean.accept", 1.0 / 3.0),
        ("turn.mean.kept == null ? 0.0 : turn.mean.kept", 0.625),
        ("turn.mean.retry == null ? -7.0 : turn.mean.retry", -7.0),
        ("turn.count.accept", 3.0),
        ("turn.all.kept.filter(k, k < 0.5).size()", 1.0),
        ("turns * 100 + segments * 10 + tokens", 460.0),
        ("ended && !declined ? seconds : 0.0", 2.5),
    ] {
        assert_eq!(reward(text, &reject), Some(expected), "{text}");
    }
}

#[test]
fn an_episodes_expression_is_tested_at_startup() {
    let refused = |text: &str| refusal_of_episode(text, &metrics());
    assert!(refused("shown ? 1.0 : 0.0").contains("names \"shown\""));
    let missing = refused("turn.last.kept * 1.0");
    assert!(missing.contains("without any feedback"), "{missing}");
    let mixed = refused("turn.last.kept == null ? null : turn.last.kept * 2");
    assert!(mixed.contains("about a turn"), "{mixed}");
    assert!(refused("accept == null ? 0.0 : turn.last.kept + 1.0").contains("none about a turn"));
    let named = [metrics(), vec![Metric::new("seconds", MetricType::Float)]].concat();
    assert!(refusal_of_episode("1.0", &named).contains("rename the metric"));
    let texts = [metrics(), vec![Metric::new("comment", MetricType::Comment)]].concat();
    let text = refusal_of_episode("turn.last.comment == null ? null : 1.0", &texts);
    assert!(text.contains("only turn.count.comment"), "{text}");
    Expression::of_episode("turn.count.comment", &texts).unwrap();
    // A generation has no turns.
    assert!(refusal("turn.count.accept").contains("names \"turn\""));
}

#[test]
fn an_episodes_expression_knows_which_metrics_of_turns_it_reads() {
    let read = |text: &str| {
        let expression = Expression::of_episode(text, &metrics()).unwrap();
        let of_episode: Vec<String> = expression.metrics().map(|(name, _)| name.to_owned()).collect();
        (of_episode.join(" "), expression.turn_metrics().join(" "))
    };
    let split = |of_episode: &str, of_turns: &str| (of_episode.to_owned(), of_turns.to_owned());
    assert_eq!(read("accept == null ? null : 1.0"), split("accept", ""));
    assert_eq!(
        read("turn . last . kept == null ? turn.count.accept : 1").1,
        "accept kept"
    );
    assert_eq!(read("turn.count.accept"), split("", "accept"));
    assert_eq!(read("turn['count']['ret' + 'ry']"), split("", "accept kept retry"));
    assert_eq!(read("turn.mean == turn.first ? 1.0 : 0.0").1, "accept kept retry");
    assert_eq!(read("turns + tokens"), split("", ""));
}

#[test]
fn an_expression_refers_to_the_metrics_whose_values_it_can_read() {
    let referred = |expression: Expression| {
        let names = metrics().into_iter().map(|metric| metric.name);
        names.filter(|name| expression.refers_to(name)).collect::<Vec<_>>()
    };
    let of_generation = |text: &str| referred(Expression::new(text, &metrics()).unwrap());
    assert_eq!(of_generation("kept == null ? null : 1.0"), ["kept"]);
    // Its own metric alone, though `all` has the others too.
    assert_eq!(of_generation("double(all.retry.size())"), ["retry"]);
    // What a comprehension binds is no metric.
    assert_eq!(
        of_generation("double( all . retry .filter(kept, kept > 1.0).size())"),
        ["retry"]
    );
    assert_eq!(
        of_generation("kept == null ? null : double(all.retry.filter(kept, kept > 1.0).size())"),
        ["kept", "retry"]
    );
    assert!(refusal("double(all.retry.filter(n, n > m).size())").contains("names \"m\""));
    assert!(refusal("all.retry.exists(n, n > 1.0) ? n : 0.0").contains("names \"n\""));
    assert_eq!(
        of_generation("double(all['re' + 'try'].size())"),
        ["accept", "kept", "retry"]
    );
    assert_eq!(of_generation("double(size(all))"), ["accept", "kept", "retry"]);
    let of_episode = Expression::of_episode("turn.count.kept == 0 ? null : double(all.accept.size())", &metrics());
    let of_episode = of_episode.unwrap();
    assert_eq!(of_episode.turn_metrics(), ["kept"]);
    assert_eq!(referred(of_episode), ["accept"]);
}
