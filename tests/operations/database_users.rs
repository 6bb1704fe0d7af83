//! What each role's own database user may do: the table in tests/database_users.txt, attacks with a
//! stolen login, and which rows each user sees. Other tests run the roles as these users.

use std::collections::BTreeMap;
use std::fmt::Write;

use sqlx::{AssertSqlSafe, Executor, PgPool};

use crate::tenants::HISTORY;
use fixture::{Stack, check_page};

const USERS: [&str; 4] = ["serve", "ingest", "control", "train"];
/// Postgres' code for a missing right, also for a row that a policy refuses.
const INSUFFICIENT_PRIVILEGE: &str = "42501";

#[tokio::test(flavor = "multi_thread")]
async fn each_user_has_the_rights_that_the_docs_list() {
    let stack = Stack::start("rights").await;
    let rows: Vec<(String, String, Vec<String>, Vec<String>)> = sqlx::query_as(
        "select c.relname::text, u.name,
                array(select r from unnest(array['select', 'insert', 'update', 'delete', 'truncate']) r
                      where has_table_privilege('springtide_' || u.name, c.oid, r)),
                array(select r from unnest(array['select', 'insert', 'update']) r
                      where has_any_column_privilege('springtide_' || u.name, c.oid, r))
         from pg_class c, unnest($1::text[]) u (name)
         where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p', 'v')
           and c.relname not like '\\_sqlx%' and not c.relispartition
         order by 1",
    )
    .bind(USERS)
    .fetch_all(&stack.pool)
    .await
    .unwrap();
    let mut tables: BTreeMap<&str, BTreeMap<&str, String>> = BTreeMap::new();
    for (table, user, whole, columns) in &rows {
        let rights = columns
            .iter()
            .chain(whole.iter().filter(|right| !columns.contains(right)));
        let rights = rights.map(|right| match whole.contains(right) {
            true => right.clone(),
            false => format!("{right} (some columns)"),
        });
        let rights: Vec<String> = rights.collect();
        tables.entry(table).or_default().insert(user, rights.join(", "));
    }
    let mut table = format!(
        "| table | {} |\n|---{}|\n",
        USERS.join(" | "),
        "|---".repeat(USERS.len())
    );
    for (name, rights) in &tables {
        let rights: Vec<&str> = USERS.iter().map(|user| rights[user].as_str()).collect();
        assert!(!rights.iter().any(|right| right.contains("truncate")), "{name}");
        writeln!(table, "| `{name}` | {} |", rights.join(" | ")).unwrap();
    }
    check_page(
        "tests/database_users.txt",
        "database users",
        "tests/operations/database_users.rs",
        &table,
    );
}

/// What a thief of a role's login tries: (user, statement).
const ATTACKS: &[(&str, &str)] = &[
    // give oneself access
    ("ingest", "insert into api_key select * from api_key"),
    ("control", "update api_key set revoked_at = null"),
    ("train", "delete from api_key"),
    ("ingest", "insert into sampler select * from sampler"),
    ("train", "update sampler set revoked_at = null"),
    ("control", "insert into sampler select * from sampler"),
    // take what was done out of the record
    ("ingest", "update audit set reason = ''"),
    ("control", "delete from audit"),
    ("train", "truncate audit"),
    ("serve", "insert into audit select * from audit"),
    // decide what serves
    ("train", "insert into release select * from release"),
    ("train", "insert into assignment select * from assignment"),
    ("ingest", "update release set status = 'done'"),
    ("serve", "insert into transition select * from transition"),
    ("control", "update assignment set version = 1"),
    // decide what is learned
    ("ingest", "insert into version select * from version"),
    ("control", "update line set head = 1"),
    ("control", "insert into step select * from step"),
    ("ingest", "insert into disposition select * from disposition"),
    ("control", "update trajectory set reward = 1"),
    ("train", "update trajectory set reward = 1"),
    (
        "train",
        "insert into generation (id, tenant_id) select id, tenant_id from generation",
    ),
    ("control", "insert into feedback select * from feedback"),
    ("control", "insert into judgement select * from judgement"),
    ("train", "update judgement set value_bool = true"),
    ("serve", "delete from judgement"),
    ("ingest", "update reward_definition set definition = '{}'"),
    ("control", "update run_event set data = '{}'"),
    ("control", "insert into trajectory_use select * from trajectory_use"),
    ("train", "insert into dataset select * from dataset"),
    ("train", "insert into experiment select * from experiment"),
    // let one tenant's data in
    (
        "train",
        "insert into tenant_consent (policy, tenant_id, given_by) values ('traced', 'theirs', 'me')",
    ),
    ("control", "update tenant_consent set withdrawn_at = null"),
    ("train", "update policy set tenant_id = 'theirs'"),
    ("control", "update policy set tenant_id = 'theirs'"),
    // read texts
    ("control", "select prompt_ids from generation"),
    ("control", "select token_ids from generation"),
    (
        "control",
        "select * from generation_texts(array['01980000-0000-7000-8000-000000000001'::uuid])",
    ),
    ("control", "select * from feedback"),
    ("control", "select * from payload_reference"),
    ("serve", "select id from generation"),
    ("serve", "select * from run"),
    ("train", "select * from feedback"),
    (
        "control",
        "select * from demonstrations(array['01980000-0000-7000-8000-000000000001'::uuid], now(), true)",
    ),
    ("control", "select * from judgement"),
    ("train", "select * from judgement"),
    ("ingest", "select * from task"),
    // past the rules
    ("ingest", "alter table generation disable row level security"),
    ("train", "drop policy train_consent on generation"),
    ("train", "create policy mine on generation using (true)"),
    ("control", "alter table audit disable trigger all"),
    ("train", "drop table feedback"),
    ("ingest", "create table mine (id int)"),
    ("serve", "create function mine() returns int language sql as 'select 1'"),
    (
        "train",
        "create or replace function consenting_tenants(policy_name text) returns text[] language sql as 'select null'",
    ),
    ("ingest", "set role springtide_train"),
    ("train", "set session authorization postgres"),
    ("control", "set session_replication_role = replica"),
    ("ingest", "set log_statement = 'all'"),
    ("serve", "alter role springtide_serve superuser"),
    ("train", "grant springtide_control to springtide_train"),
    ("control", "select grant_database_rights()"),
    (
        "train",
        "select drop_generations('generation_2020w01', '01980000-0000-7000-8000-000000000001')",
    ),
    ("control", "select drop_trajectories('trajectory_2020w01')"),
    (
        "control",
        "select drop_without_consent('traced', null, '00000000-0000-0000-0000-000000000000', 10)",
    ),
    // a function that runs with the owner's rights
    (
        "ingest",
        "select drop_generations('audit', '01980000-0000-7000-8000-000000000001')",
    ),
    ("ingest", "select drop_trajectories('audit')"),
    (
        "ingest",
        "select drop_trajectories('trajectory_2020w01; drop table audit')",
    ),
    (
        "ingest",
        "select create_generation_partition('audit_2020w01', '01980000-0000-7000-8000-000000000001', '01980000-0000-7000-8000-000000000002')",
    ),
    // out of the database
    ("train", "copy (select 1) to program 'id'"),
    ("ingest", "copy (select 1) to '/tmp/springtide-attack'"),
    ("control", "select pg_read_file('/etc/passwd')"),
    ("serve", "select lo_import('/etc/passwd')"),
    ("serve", "alter system set archive_command = 'id'"),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_stolen_login_is_refused_what_its_role_does_not_do() {
    let stack = Stack::start("stolen_login").await;
    stack.pool.execute(HISTORY).await.unwrap();
    let pools: BTreeMap<&str, PgPool> = USERS.iter().map(|user| (*user, stack.pool_of(user))).collect();
    for (user, statement) in ATTACKS {
        let result = pools[user].execute(*statement).await;
        let error = result.map(|_| ()).expect_err(statement);
        let code = error
            .as_database_error()
            .and_then(|error| error.code())
            .unwrap_or_default();
        assert_eq!(code, INSUFFICIENT_PRIVILEGE, "{user}: {statement}: {error}");
    }
}

/// Generations that the user sees after these settings.
async fn seen(pool: &PgPool, settings: &[(&str, &str)], query: &str) -> Vec<String> {
    let mut transaction = edge::database::begin(pool).await.unwrap();
    for (name, value) in settings {
        let set = sqlx::query("select set_config($1, $2, true)").bind(name).bind(value);
        set.execute(&mut *transaction).await.unwrap();
    }
    let mut ids: Vec<String> = sqlx::query_scalar(AssertSqlSafe(query.to_owned()))
        .fetch_all(&mut *transaction)
        .await
        .unwrap();
    ids.sort();
    ids
}

#[tokio::test(flavor = "multi_thread")]
async fn queries_without_a_condition_show_no_other_tenants_rows() {
    let stack = Stack::start("rows_of_tenants").await;
    stack.pool.execute(HISTORY).await.unwrap();
    let tenants = "select distinct tenant_id from generation";
    let (both, none): (&[&str], &[&str]) = (&["ours", "theirs"], &[]);

    // A request of ingest names its tenant. Jobs name none.
    let ingest = stack.pool_of("ingest");
    assert_eq!(seen(&ingest, &[], tenants).await, both);
    assert_eq!(seen(&ingest, &[("springtide.tenant", "ours")], tenants).await, ["ours"]);
    assert_eq!(seen(&ingest, &[("springtide.tenant", "third")], tenants).await, none);
    assert_eq!(
        seen(&ingest, &[], tenants).await,
        both,
        "the setting ends with its transaction"
    );
    for table in [
        "event_key",
        "feedback",
        "retraction",
        "episode_end",
        "payload_reference",
        "expired_generation",
        "judgement",
    ] {
        let count = format!("select count(*)::text from {table}");
        seen(&ingest, &[("springtide.tenant", "ours")], &count).await;
    }

    // Each request of control says whose rows it shows.
    let control = stack.pool_of("control");
    assert_eq!(seen(&control, &[], tenants).await, none);
    assert_eq!(
        seen(&control, &[("springtide.tenant", "theirs")], tenants).await,
        ["theirs"]
    );
    assert_eq!(seen(&control, &[("springtide.all_tenants", "on")], tenants).await, both);
    let ledger = "select distinct tenant_id from ledger";
    assert_eq!(
        seen(&control, &[("springtide.tenant", "theirs")], ledger).await,
        ["theirs"]
    );

    // The trainer sees whoever consents, at once.
    let train = stack.pool_of("train");
    assert_eq!(seen(&train, &[], tenants).await, both);
    let withdraw = "update tenant_consent set withdrawn_at = now(), withdrawn_by = 'a test'";
    stack.pool.execute(withdraw).await.unwrap();
    assert_eq!(seen(&train, &[], tenants).await, ["ours"]);
    assert_eq!(
        seen(&train, &[("springtide.tenant", "theirs")], tenants).await,
        ["ours"]
    );
    assert_eq!(
        seen(&train, &[("springtide.all_tenants", "on")], tenants).await,
        ["ours"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn migrating_again_gives_back_rights_that_somebody_changed() {
    let stack = Stack::start("rights_again").await;
    let tampered = "grant all on all tables in schema public to springtide_serve;
                    revoke select on generation from springtide_train";
    stack.pool.execute(tampered).await.unwrap();
    let serve = stack.pool_of("serve");
    serve.execute("select id from generation").await.unwrap();
    stack.pool.execute("select grant_database_rights()").await.unwrap();
    serve.execute("select id from generation").await.unwrap_err();
    stack
        .pool_of("train")
        .execute("select id from generation")
        .await
        .unwrap();
}
